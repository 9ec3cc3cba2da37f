"""Decides what runs next: admission, preemption, co-scheduling policies, latency model. No tensors here."""
