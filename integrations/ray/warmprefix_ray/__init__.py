"""DatasetPlanning and running of more requests than one machine can hold, with Ray. Needs the extra `ray`."""

from warmprefix_ray.cluster import RayClusterError, connect
from warmprefix_ray.dataset_plan import DatasetPlan, plan_dataset
from warmprefix_ray.dataset_run import run_dataset
from warmprefix_ray.partition_plan import DatasetPlanning
from warmprefix_ray.rows import request_of_row

__all__ = [
    "DatasetPlan",
    "DatasetPlanning",
    "RayClusterError",
    "connect",
    "plan_dataset",
    "request_of_row",
    "run_dataset",
]
