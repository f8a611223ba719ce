"""A user's own data loader reads a dataset in worker processes, which are no ranks."""

import sys
import textwrap

import numpy as np
import pytest

from tests.run_mpi import completed, mpiexec

SCRIPT = """
    import sys
    import numpy as np, torch
    from mpi4py import MPI
    from torch.utils.data import DataLoader
    from distdl_rma import Machine, ShardDataset, SplitTensor

    def main():
        rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
        whole = np.load(sys.argv[1])
        dataset = ShardDataset(sys.argv[1], list(range(len(whole))), grid={"H": -1}, flip="W", seed=1)
        loader = DataLoader(dataset, 2, num_workers=2, multiprocessing_context=sys.argv[2])
        seen = 0
        for blocks, numbers in loader:
            x = SplitTensor.from_local(blocks, dataset.partition, (len(blocks), *dataset.shape))
            for one, n in zip(x.full_tensor().numpy(), numbers.tolist()):
                assert (one == whole[n]).all() or (one == whole[n][..., ::-1]).all()
                seen += 1
        assert seen == len(whole)
        print("read", seen, flush=True)

    if __name__ == "__main__":
        main()
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_workers_of_a_data_loader_read_unless_they_are_forks(tmp_path, method):
    np.save(tmp_path / "x.npy", np.random.default_rng(0).random((5, 1, 7, 6)))
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    job = [
        *mpiexec(2),
        sys.executable,
        "-m",
        "mpi4py",
        str(tmp_path / "script.py"),
        str(tmp_path / "x.npy"),
        method,
    ]
    done = completed(job)
    said = done.stdout + done.stderr
    if method == "fork":
        assert done.returncode != 0 and "UnsupportedError" in said and "is a fork of a rank" in said, said
        assert "multiprocessing_context='spawn'" in said
    else:
        assert done.returncode == 0 and done.stdout.count("read 5") == 2, said
