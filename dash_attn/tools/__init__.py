"""What is built around the library: the command line, benchmarks, traces, pictures. Needs dash-attn[tools]."""
