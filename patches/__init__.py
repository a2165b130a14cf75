"""Guarded fixes of PyTorch internals, one file a patch. No supported version needs one for what is here now."""
