"""Jobs with files: data, checkpoints, and work that is larger than memory.

``data`` loads shards of samples and writes shards of results; ``checkpoints`` are directories that know no
number of ranks; ``out_of_core`` has ``predict``, which computes a large sample in slabs that wait on disk,
and ``spill``, which keeps tensors of a training step there. They need ``layers``, and nothing but the
command imports them. Begin with ``data/dataset.py``, ``checkpoints/job.py``, or ``out_of_core/predict.py``.
"""
