"""What becomes of requests while replicas, signals, files and the router fail, over real processes and sockets."""
