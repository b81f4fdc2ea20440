#!/bin/sh
# Runs a test of the Python package with the first Python that has PyTorch: EVENKEEL_PYTHON alone where it is set, else
# python3, else the system's own. Exit code 77: none has it.
for python in ${EVENKEEL_PYTHON:-python3 /usr/bin/python3}; do
  command -v "$python" >/dev/null 2>&1 || continue
  # Torch's threads sleep while ours work, and the other way round: machines for tests have few cores.
  # Torch and its BLAS take the same instructions on every machine: small trainings then take the same course everywhere.
  # So OPENBLAS_CORETYPE is not taken from the environment. EVENKEEL_BLAS=Haswell (Prescott, SkylakeX) gives another course,
  # to see what of a test is chance.
  OMP_WAIT_POLICY=passive ATEN_CPU_CAPABILITY=default DNNL_MAX_CPU_ISA=SSE41 OPENBLAS_CORETYPE=${EVENKEEL_BLAS:-Nehalem} \
    "$python" "$@"
  status=$?
  [ $status = 77 ] || exit $status
done
echo "skipped: no Python with PyTorch here (Debian: python3-torch; EVENKEEL_PYTHON names another Python)"
exit 77
