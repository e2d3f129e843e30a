"""Planning and running of more requests than one machine can hold, with Ray. Needs the extra `ray`."""

from warmprefix.ray.cluster import RayClusterError, connect
from warmprefix.ray.plan_dataset import DatasetPlan, plan_dataset
from warmprefix.ray.rows import request_of_row
from warmprefix.ray.run_dataset import run_dataset

__all__ = ["DatasetPlan", "RayClusterError", "connect", "plan_dataset", "request_of_row", "run_dataset"]
