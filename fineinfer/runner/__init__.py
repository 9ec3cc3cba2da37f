"""Runs a plan on the model: builds the forward batch, runs the layers, samples. The only place with inference_mode."""
