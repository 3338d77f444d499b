extern "C" int kvconv_placeholder() { return 0; }
