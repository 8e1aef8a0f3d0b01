/* Live bytes of aligned allocations: what torch's CPU allocator, oneDNN and gloo take for tensors and buffers.

   Loaded by LD_PRELOAD for a measurement. Only posix_memalign, memalign and aligned_alloc are counted, with the
   bytes asked for: Python's own objects and the code of libraries are no part of it. */

#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

extern void *__libc_memalign(size_t alignment, size_t size);
extern void __libc_free(void *block);

/* Blocks that are alive, in a hash table with linear probing. */
#define CAPACITY ((size_t)1 << 20)
#define DELETED ((void *)1)
static struct {
    void *block;
    size_t size;
} table[CAPACITY];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static long long live, peak, lost;

static size_t place_of(void *block) { return ((uintptr_t)block >> 4) * 0x9E3779B97F4A7C15ull >> 44; }

static void add(void *block, size_t size) {
    pthread_mutex_lock(&lock);
    size_t place = place_of(block), probes = 0;
    while (table[place].block > DELETED && ++probes < CAPACITY)
        place = (place + 1) % CAPACITY;
    if (probes == CAPACITY) {
        lost += size;
    } else {
        table[place].block = block;
        table[place].size = size;
        live += size;
        if (live > peak)
            peak = live;
    }
    pthread_mutex_unlock(&lock);
}

static void drop(void *block) {
    pthread_mutex_lock(&lock);
    size_t place = place_of(block);
    for (size_t probes = 0; table[place].block && probes < CAPACITY; probes++) {
        if (table[place].block == block) {
            table[place].block = DELETED;
            live -= table[place].size;
            break;
        }
        place = (place + 1) % CAPACITY;
    }
    pthread_mutex_unlock(&lock);
}

void *memalign(size_t alignment, size_t size) {
    void *block = __libc_memalign(alignment, size);
    if (block)
        add(block, size);
    return block;
}

void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

int posix_memalign(void **out, size_t alignment, size_t size) {
    void *block = memalign(alignment, size);
    if (!block)
        return ENOMEM;
    *out = block;
    return 0;
}

void free(void *block) {
    /* Aligned blocks of torch begin at multiples of 64; most others need not be looked for. */
    if (block && ((uintptr_t)block & 15) == 0)
        drop(block);
    __libc_free(block);
}

long long live_bytes(void) { return live; }
long long lost_bytes(void) { return lost; }
long long peak_bytes(void) { return peak; }
void reset_peak(void) {
    pthread_mutex_lock(&lock);
    peak = live;
    pthread_mutex_unlock(&lock);
}
