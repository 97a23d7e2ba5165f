"""How a matrix of weights is stored on the device, and its products; knows no layer and no file."""
