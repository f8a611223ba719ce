"""Whether an installation and a job work: facts of all ranks, measurements, findings, a report."""
