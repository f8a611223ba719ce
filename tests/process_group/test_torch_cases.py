"""torch's own cases for process groups; all of them run by ``tests/process_group/torch_cases.py``."""

import pytest

from tests.process_group import torch_cases

pytestmark = [pytest.mark.mpi(min_size=3), pytest.mark.sizes(3)]

# One of each kind; those for sub-groups go through the same calls.
CASES = """
DistributedDataParallelCPU_grad_is_view accumulate_gradients_no_sync_allreduce_with_then_hook
all_gather_coalesced_with_empty all_gather_complex all_gather_object_default_pg all_gather_object_subgroup
all_reduce_coalesced_group_max all_reduce_complex_unsupported_ops all_reduce_full_group_product
all_reduce_sum_async all_to_all_group all_to_all_single_unequal_split_complex batch_isend_irecv_gloo_tags
broadcast broadcast_object_list ddp_create_graph destroy_group gather_checks gather_object
gather_object_subgroup get_future get_rank_size_group grads_same_across_ranks_with_no_sync irecv
reduce_group_min reduce_sum_twice scatter_checks scatter_group scatter_object_list send_recv_any_source
send_recv_with_tag_torch_profiler static_graph_api_cpu
"""


@pytest.mark.parametrize("case", CASES.split())
def test_case_of_torch(comm, case):
    pytest.importorskip("expecttest")
    torch_cases.run(f"test_{case}")
