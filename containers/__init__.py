"""How images are built, and the lab. Runs on the control machine; never imports torch, launch or Ansible."""
