"""Where trials run: `local.LocalProcesses` on this machine, `dask.DaskCluster` on any cluster that Dask runs on,
`slurm.SlurmCluster` in jobs of Slurm.

The contract is in `base`; `evergrad.testing.ExecutorContract` holds any executor to it.
"""

# Nothing is imported here: every worker process comes through this package.
__all__: list[str] = []
