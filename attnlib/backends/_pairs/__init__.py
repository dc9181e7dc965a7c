"""What backends that consist of two others share: `composite` and `cascade`."""
