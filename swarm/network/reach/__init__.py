"""Being reachable: dial-back checks, relaying for others, and being relayed."""
