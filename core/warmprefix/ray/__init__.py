"""Planning and running of more requests than one machine can hold, with Ray. Needs the extra `ray`."""

from warmprefix.ray.cluster import RayClusterError, connect
from warmprefix.ray.dataset_plan import DatasetPlan, plan_dataset
from warmprefix.ray.dataset_run import run_dataset
from warmprefix.ray.rows import request_of_row

__all__ = ["DatasetPlan", "RayClusterError", "connect", "plan_dataset", "request_of_row", "run_dataset"]
