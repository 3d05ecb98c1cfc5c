"""The configuration: keys and their help, composed by Hydra from `conf/` and a command line."""
