// Has Chromium run WebGPU on the Vulkan driver of VK_DRIVER_FILES. Of drivers that run on the CPU it takes its own SwiftShader alone;
// Mesa's needs a tenth of the time for a token, and keeps what it compiled for the next browser.
//
//   cc -O2 -shared -fPIC -o driver.so tests/browser/driver.c -ldl
//   VK_DRIVER_FILES=.../lvp_icd.json LD_PRELOAD=$PWD/driver.so chromium --enable-unsafe-webgpu --use-webgpu-adapter=swiftshader
//
// It is loaded before the browser: who opens libvk_swiftshader.so gets this library in its place, which goes on to the system's Vulkan
// loader and calls every device what Chromium wants to hear.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>

typedef void (*function)(void);

// The beginning of VkPhysicalDeviceProperties, and VkPhysicalDeviceProperties2.
struct properties {
    uint32_t api_version, driver_version, vendor, device;
};
struct properties2 {
    uint32_t type;
    void *next;
    struct properties properties;
};

static const uint32_t google = 0x1AE0, swiftshader = 0xC0DE;

static function (*loader)(void *, const char *);
static void (*get_properties)(void *, struct properties *);
static void (*get_properties2)(void *, struct properties2 *);

static void rename_device(struct properties *properties) {
    properties->vendor = google;
    properties->device = swiftshader;
}

static void renamed_properties(void *device, struct properties *properties) {
    get_properties(device, properties);
    rename_device(properties);
}

static void renamed_properties2(void *device, struct properties2 *properties) {
    get_properties2(device, properties);
    rename_device(&properties->properties);
}

function vkGetInstanceProcAddr(void *instance, const char *name) {
    if (!loader) {
        void *vulkan = dlopen("libvulkan.so.1", RTLD_NOW | RTLD_LOCAL);
        if (vulkan) loader = (function (*)(void *, const char *))dlsym(vulkan, "vkGetInstanceProcAddr");
        if (!loader) return 0;
    }
    function found = loader(instance, name);
    if (!found) return 0;
    if (!strcmp(name, "vkGetInstanceProcAddr")) return (function)vkGetInstanceProcAddr;
    if (!strcmp(name, "vkGetPhysicalDeviceProperties")) {
        get_properties = (void (*)(void *, struct properties *))found;
        return (function)renamed_properties;
    }
    if (!strcmp(name, "vkGetPhysicalDeviceProperties2") || !strcmp(name, "vkGetPhysicalDeviceProperties2KHR")) {
        get_properties2 = (void (*)(void *, struct properties2 *))found;
        return (function)renamed_properties2;
    }
    return found;
}

void *dlopen(const char *file, int mode) {
    static void *(*next)(const char *, int);
    if (!next) next = (void *(*)(const char *, int))dlsym(RTLD_NEXT, "dlopen");
    const char *wanted = "libvk_swiftshader.so";
    size_t length = file ? strlen(file) : 0;
    Dl_info self;
    if (length >= strlen(wanted) && !strcmp(file + length - strlen(wanted), wanted) && dladdr((void *)&dlopen, &self)) file = self.dli_fname;
    return next(file, mode);
}
