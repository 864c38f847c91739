"""Predicted times of GPU kernels, from what their code and the card can do at most, calibrated on
half of the measurements that others published. `bench/predict.py` prints them."""
