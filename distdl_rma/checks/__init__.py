"""Whether all ranks do the same: what is compared, and the error that all raise where it differs."""
