"""Pipeline parallelism: stages cut from the captured graph, run by a schedule of torch's."""
