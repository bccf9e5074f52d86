// Drawing a token from a row of logits: integer probabilities, what top-k and top-p keep of them, and searches in the order of ids.
// For a workgroup of 256. The importing kernel says where logits are, `logit_quad(quad)` being the bits of four of them, and how
// many there are: `vocabulary()`.
//
// Temperature 0 takes the largest logit. Otherwise probabilities are 31-bit integers q = floor(2^31 w / sum of w), with
// w = exp((logit - largest) / temperature), and what follows is integer arithmetic: top-k, then top-p, in the order of
// larger q, then lower id; and the draw in the order of ids. Equal q give equal tokens on every device.
#import u64

const NONE: u32 = 0xffffffffu;
const THREADS: u32 = 256u;


// Pairs on their way through a reduction or a scan.
var<workgroup> pairs: array<vec2<u32>, THREADS>;
var<workgroup> floats: array<f32, THREADS>;
// Of each digit of q: how many ids have it, and their q together.
var<workgroup> counts: array<atomic<u32>, THREADS>;
var<workgroup> masses: array<atomic<u32>, THREADS>;
// What one invocation found.
var<workgroup> found: array<u32, 4>;
// The best id of a row.
var<workgroup> best_id: u32;

// What probabilities are made of: w = exp((logit - largest) / temperature), q = floor(w / sum * 2^31).
var<private> largest: f32;
var<private> temperature: f32;
var<private> sum: f32;
// What `draw` drew from: the q of all ids that are kept, together.
var<private> mass: u32;

// The ids that may be drawn: all with q > cut, and the first `ties` of the `equal` ids with q == cut.
struct Kept {
    cut: u32,
    ties: u32,
    equal: u32,
}

fn quads() -> u32 {
    return (vocabulary() + 3u) / 4u;
}

// Four quads, `stride` apart: loaded together, so that memory is waited for once. Ids beyond the vocabulary are for the
// caller to leave out.
fn load(quad: u32, stride: u32) -> array<vec4<u32>, 4> {
    return array(logit_quad(quad), logit_quad(quad + stride), logit_quad(quad + 2u * stride), logit_quad(quad + 3u * stride));
}

// The id of element k of what `load` returned.
fn id_of(quad: u32, stride: u32, k: u32) -> u32 {
    return (quad + k / 4u * stride) * 4u + k % 4u;
}

fn weight(bits: u32) -> f32 {
    // exp(-104) is zero already; the bound keeps infinities out.
    return exp(max((bitcast<f32>(bits) - largest) / temperature, -104.0));
}

fn probability(bits: u32) -> u32 {
    return u32(weight(bits) / sum * 2147483648.0);
}

// Orders finite floats as integers, -0.0 like +0.0; NONE for NaN and infinities.
fn logit_key(bits: u32) -> u32 {
    if (bits & 0x7f800000u) == 0x7f800000u {
        return NONE;
    }
    let positive = (bits >> 31u) == 0u || bits == 0x80000000u;
    return select(~bits, bits | 0x80000000u, positive);
}

// The largest key of all logits, and the lowest id that has it.
fn greedy(local: u32) -> vec2<u32> {
    // Keys of finite floats are above zero.
    var best = vec2(0u, 0u);
    for (var quad = local; quad < quads(); quad += 4u * THREADS) {
        var bits = load(quad, THREADS);
        for (var k = 0u; k < 16u; k++) {
            let id = id_of(quad, THREADS, k);
            let key = logit_key(bits[k / 4u][k % 4u]);
            if key > best.x && id < vocabulary() {
                best = vec2(key, id);
            }
        }
    }
    pairs[local] = best;
    for (var half = THREADS / 2u; half > 0u; half >>= 1u) {
        workgroupBarrier();
        if local < half {
            let a = pairs[local];
            let b = pairs[local + half];
            pairs[local] = select(a, b, b.x > a.x || (b.x == a.x && b.y < a.y));
        }
    }
    return workgroupUniformLoad(&pairs[0]);
}

// The sum of all weights.
fn weigh(local: u32) -> f32 {
    var total = 0.0;
    for (var quad = local; quad < quads(); quad += 4u * THREADS) {
        var bits = load(quad, THREADS);
        for (var k = 0u; k < 16u; k++) {
            total += select(0.0, weight(bits[k / 4u][k % 4u]), id_of(quad, THREADS, k) < vocabulary());
        }
    }
    floats[local] = total;
    for (var half = THREADS / 2u; half > 0u; half >>= 1u) {
        workgroupBarrier();
        if local < half {
            floats[local] += floats[local + half];
        }
    }
    return workgroupUniformLoad(&floats[0]);
}

// Sums of the values of invocations 0 ..= local. Leaves the sum of all in the last of `pairs`.
fn scan(local: u32, value: vec2<u32>) -> vec2<u32> {
    var total = value;
    workgroupBarrier();
    pairs[local] = total;
    for (var stride = 1u; stride < THREADS; stride <<= 1u) {
        workgroupBarrier();
        if local >= stride {
            total += pairs[local - stride];
        }
        workgroupBarrier();
        pairs[local] = total;
    }
    workgroupBarrier();
    return total;
}

fn add_to_digit(digit: u32, count: u32, mass: u32) {
    if count > 0u {
        atomicAdd(&counts[digit], count);
        atomicAdd(&masses[digit], mass);
    }
}

// Of the ids in `kept`, keeps the `top_k` likeliest; or, with top_k = 0, the likeliest that together reach top_p of their
// mass. A radix search for the cut, a digit of 8 bits at a time.
fn keep(local: u32, kept: Kept, top_k: u32, top_p: f32) -> Kept {
    let by_mass = top_k == 0u;
    var cut = 0u;
    var goal = top_k;
    var equal = 0u;
    for (var shift = 24u; shift < 32u; shift -= 8u) {
        workgroupBarrier();
        atomicStore(&counts[local], 0u);
        atomicStore(&masses[local], 0u);
        workgroupBarrier();
        // Most ids are of one digit, zero: an invocation adds up what it meets in a row before it touches shared memory.
        var digit = 0u;
        var run = vec2(0u);
        for (var quad = local; quad < quads(); quad += 4u * THREADS) {
            var bits = load(quad, THREADS);
            for (var k = 0u; k < 16u; k++) {
                let q = probability(bits[k / 4u][k % 4u]);
                let among = q >= kept.cut && ((q ^ cut) >> shift) <= 255u;
                if !among || id_of(quad, THREADS, k) >= vocabulary() {
                    continue;
                }
                let its_digit = (q >> shift) & 255u;
                if its_digit != digit {
                    add_to_digit(digit, run.x, run.y);
                    digit = its_digit;
                    run = vec2(0u);
                }
                run += vec2(1u, q);
            }
        }
        add_to_digit(digit, run.x, run.y);
        workgroupBarrier();

        // The highest digit first.
        let mine = cut | ((255u - local) << shift);
        let all = vec2(atomicLoad(&counts[255u - local]), atomicLoad(&masses[255u - local]));
        var value = all;
        if kept.cut >> shift == mine >> shift {
            let surplus = kept.equal - kept.ties;
            value -= vec2(surplus, surplus * kept.cut);
        }
        let reached = scan(local, value);
        if shift == 24u && by_mass {
            let total = pairs[THREADS - 1u].y;
            goal = clamp(u32(ceil(top_p * f32(total))), 1u, total);
        }
        let end = select(reached.x, reached.y, by_mass);
        let begin = end - select(value.x, value.y, by_mass);
        if begin < goal && goal <= end {
            found[0] = mine;
            found[1] = goal - begin;
            found[2] = all.x;
        }
        cut = workgroupUniformLoad(&found[0]);
        goal = workgroupUniformLoad(&found[1]);
        equal = workgroupUniformLoad(&found[2]);
    }
    let ties = select(goal, (goal + cut - 1u) / max(cut, 1u), by_mass);
    return Kept(cut, ties, equal);
}

const DRAW: u32 = 0u;
const TIES: u32 = 1u;

// What an id adds to the running sum of `search`: its probability if it is kept, up to the id `last_tie` where q is at
// the cut; or 1 if q is at the cut.
fn contribution(task: u32, id: u32, bits: u32, cut: u32, last_tie: u32) -> u32 {
    if id >= vocabulary() {
        return 0u;
    }
    let q = probability(bits);
    if task == TIES {
        return select(0u, 1u, q == cut);
    }
    return select(0u, q, q > cut || (q == cut && id <= last_tie));
}

// The first id at which the running sum of contributions, in the order of ids, exceeds `number`; for DRAW, exceeds
// the share number / 2^32 of their total.
fn search(local: u32, task: u32, number: u32, cut: u32, last_tie: u32) -> u32 {
    var rest = number;
    var first = 0u;
    var end = quads();
    loop {
        // An invocation sums a run of neighbouring quads; the run of the id is the next range.
        let each = (end - first + THREADS - 1u) / THREADS;
        let begin = first + local * each;
        let stop = min(begin + each, end);
        var mine = 0u;
        for (var quad = begin; quad < stop; quad += 4u) {
            var bits = load(quad, 1u);
            for (var k = 0u; k < 16u; k++) {
                let share = contribution(task, id_of(quad, 1u, k), bits[k / 4u][k % 4u], cut, last_tie);
                mine += select(0u, share, quad + k / 4u < stop);
            }
        }
        let reached = scan(local, vec2(mine, 0u)).x;
        if task == DRAW && first == 0u && end == quads() {
            mass = pairs[THREADS - 1u].x;
            rest = u64_mul_wide(number, mass).y;
        }
        if rest < reached && rest >= reached - mine {
            found[0] = begin;
            found[1] = stop;
            found[2] = rest - (reached - mine);
        }
        first = workgroupUniformLoad(&found[0]);
        end = workgroupUniformLoad(&found[1]);
        rest = workgroupUniformLoad(&found[2]);
        if each == 1u {
            break;
        }
    }
    let bits = logit_quad(first);
    var id = first * 4u;
    for (var k = 0u; k < 4u; k++) {
        let share = contribution(task, id, bits[k], cut, last_tie);
        if rest < share {
            break;
        }
        rest -= share;
        id++;
    }
    return id;
}

// PCG-RXS-M-XS.
fn pcg(value: u32) -> u32 {
    let state = value * 747796405u + 2891336453u;
    let word = ((state >> ((state >> 28u) + 4u)) ^ state) * 277803737u;
    return (word >> 22u) ^ word;
}

// What is drawn from a row of logits.
struct Odds {
    best: u32,     // the largest logit's id, the lower one among equals; NONE when a logit is not finite
    largest: f32,  // the largest logit
    sum: f32,      // of all weights
    cut: u32,      // kept are the ids with q > cut, and of those with q == cut the ones up to `last_tie`
    last_tie: u32,
}

// Finds a row's odds, and leaves what probabilities are made of in the private variables. At temperature 0 only the best id
// is found.
fn find_odds(local: u32, heat: f32, top_k: u32, top_p: f32) -> Odds {
    let best = greedy(local);
    if local == 0u {
        best_id = select(best.y, NONE, best.x == NONE);
    }
    if best.x == NONE || heat == 0.0 {
        return Odds(select(best.y, NONE, best.x == NONE), 0.0, 0.0, 0u, 0u);
    }
    largest = bitcast<f32>(logit_quad(best.y / 4u)[best.y % 4u]);
    temperature = heat;
    sum = weigh(local);
    var kept = Kept(0u, 0u, 0u);
    if top_k > 0u && top_k < vocabulary() {
        kept = keep(local, kept, top_k, 1.0);
    }
    if top_p < 1.0 {
        kept = keep(local, kept, 0u, top_p);
    }
    var last_tie = NONE;
    if kept.ties < kept.equal {
        last_tie = search(local, TIES, kept.ties - 1u, kept.cut, NONE);
    }
    return Odds(best.y, largest, sum, kept.cut, last_tie);
}

// The best id of the row whose odds were found last, or NONE: what all invocations may decide by.
fn best_of_row() -> u32 {
    return workgroupUniformLoad(&best_id);
}

// The token that a random number draws from a row with these odds, the private variables being the row's.
fn draw(local: u32, odds: Odds, random: u32) -> u32 {
    return search(local, DRAW, random, odds.cut, odds.last_tie);
}

// The random number of a draw: `stream` 0 is what tokens are drawn with, others are hashed once more.
fn random_number(seed_lo: u32, seed_hi: u32, stream: u32, counter: u32) -> u32 {
    let seed = pcg(seed_hi + pcg(seed_lo));
    if stream == 0u {
        return pcg(counter + seed);
    }
    return pcg(counter + pcg(stream + seed));
}
