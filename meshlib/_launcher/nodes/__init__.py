"""The agents of several nodes: who takes part, who leads, what comes next."""
