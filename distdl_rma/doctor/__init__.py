"""Whether an installation and a job work: facts of all ranks, measurements, findings, a report.

``python -m distdl_rma doctor`` is the only user. Begin with ``command.py``; ``facts.py`` are plain data,
and a finding is a function of facts, so that tests make both without a cluster.
"""
