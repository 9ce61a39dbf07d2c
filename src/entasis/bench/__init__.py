"""What training costs, before it is begun."""
