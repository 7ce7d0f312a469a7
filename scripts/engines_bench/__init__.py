"""What ``bench_engines.py`` measures in ranks: seconds, bytes held, bytes sent, bytes gathered, growth."""
