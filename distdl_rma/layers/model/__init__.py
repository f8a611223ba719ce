"""Whole models on split tensors: distribute one, compare it with the same model alone, report its costs.

``distribute`` puts hooks around an unchanged model. What they do is in files of their own: ``entering``
(which module runs), ``leaving`` (what a call leaves in plain tensors), ``replica_check`` (whether copies of
weights are alike). ``compare`` and ``report`` are tools for users of such a model.
"""
