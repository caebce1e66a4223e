"""This process: set-up, devices, CPU, versions, the processes of a launch, and modules of the user."""
