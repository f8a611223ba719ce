"""Functions that look at neighbours or at whole images: convolutions, pools, padding, resizing, norms."""
