"""Lint of rendered or hand-edited manifests.

document -> workload -> invocation read a manifest; rendezvous, gang, pod and security hold the rules; linter runs
them. A finding has a rule id, a severity, a path, a message and a remedy; a rule never raises on a malformed manifest.
"""
