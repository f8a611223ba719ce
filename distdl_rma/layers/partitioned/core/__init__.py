"""The base of all distributed layers: arguments, agreement on inputs, parameters and errors."""
