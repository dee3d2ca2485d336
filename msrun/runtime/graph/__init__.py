"""One graph, a few passes: capture, operator rules, partition, segments, execution."""
