"""Integer ids for the Python objects of a call under torch.compile (`attnlib.layer.operator`)."""
