"""What ``bench_engines.py`` measures on ranks: seconds, bytes held, bytes sent, bytes gathered, growth."""
