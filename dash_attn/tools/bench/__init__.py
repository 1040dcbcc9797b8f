"""Benchmarks: throughput and memory beside the peers, the paper's figures and tables, and an audit of determinism."""
