"""Makes damaged networks to heal: hosts, damage, data and corrections in closed form."""
