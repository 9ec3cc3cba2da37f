"""What can go wrong between a model's name and its weights in memory."""


class ModelLoadError(ValueError):
    """A model that cannot be loaded; the message is one sentence that names the cause."""


class UnsupportedModelError(ModelLoadError):
    """A model of an architecture, or with an option, that this engine does not run."""
