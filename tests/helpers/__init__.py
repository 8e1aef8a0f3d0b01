"""What tests share: small models, plans by hand, and processes to run them on."""
