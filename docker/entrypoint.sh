#!/bin/sh
# Arguments after the image's name are those of gpuscore. Options alone are options of gpuscore serve.
case "$1" in
  --help | -h | --version) ;;
  -*) set -- serve "$@" ;;
esac
exec gpuscore "$@"
