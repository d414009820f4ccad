"""How settings are read: the forms of their values, the stack's file, and what is wrong in them."""
