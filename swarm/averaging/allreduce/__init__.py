"""One averaging round: its plan, the exchange, and the service that answers the other members."""
