"""Whether an installation and a job work: facts of all ranks, measurements, findings, a report.

``distdl_rma doctor`` is the only user. Begin with ``command.py``; ``facts.py`` are plain data,
and a finding is a function of facts, so that tests make both without a cluster::

    each rank:      facts ---> sent to the first rank ----> Job ---> findings ---> report
                    measurements, by calls of the library -^

A job that is broken is the usual case here. So every step may fail or hang, on any rank, and what is known
until then is reported all the same.
"""
