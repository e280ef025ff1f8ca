"""The replica, the gateway, the fast controller, wire formats and the load generator."""
