"""Who is who in a cluster: its certificate authority, certificates of nodes and clients, and tokens to join with."""
