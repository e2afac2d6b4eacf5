"""What files hold, checked before any of it is used; README.md says which module reads what."""
