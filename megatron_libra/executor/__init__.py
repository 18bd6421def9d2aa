"""Run a pool plan: move rows, call attention kernels, move results home (paper 4.4 and 5).

In: a PoolPlan and this worker's Q, K, V. Out: this worker's attention output and gradients.
Importing the package loads no torch, so that the planner process, which lives in `plan_server`,
stays light.
"""
