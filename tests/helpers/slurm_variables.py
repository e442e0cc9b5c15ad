"""The variables that ``srun`` gives to the tasks of a job."""

import socket


def variables_of_tasks(number: int, num_nodes: int = 1) -> list[dict[str, str]]:
    """Return the variables of each task, with a free port for the store. All nodes have the address of this host."""
    of_node = number // num_nodes
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "relay",
        "SLURM_NTASKS": str(number),
        "SLURM_NTASKS_PER_NODE": str(of_node),
        "SLURM_NNODES": str(num_nodes),
        "SLURM_NODELIST": "127.0.0.1",
        "MASTER_PORT": port,
    }
    return [
        {**common, "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i % of_node), "SLURM_NODEID": str(i // of_node)}
        for i in range(number)
    ]
