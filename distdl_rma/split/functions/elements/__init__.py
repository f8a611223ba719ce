"""Functions of single elements: pointwise, drawn, made anew, asked for."""
