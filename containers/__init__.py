"""Building of images, and the lab. Runs on the control machine; never imports torch, launch, train or Ansible.

Images: base.py, wheels.py, horovod_wheel.py, image.py. Kept in Podman's storage, and in build/images/ for hosts.
The lab: lab_plan.py, lab_host.py, lab.py. Under both of them: engine.py (commands) and files.py (writing, locks).
"""
