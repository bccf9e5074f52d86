//! `numpy.random.default_rng(seed).integers(0, bound)`: PCG64 seeded by SeedSequence. The Engram hash multipliers are
//! defined by it (`numerics.md` §8). Seeds here are one 32-bit word or two; numbers are NumPy's, bit for bit.

/// PCG64: a 128-bit linear congruential generator with XSL-RR output.
pub(super) struct Pcg64 {
    state: u128,
    increment: u128,
    /// Upper half of a 64-bit output whose lower half was given out as 32 bits.
    half: Option<u32>,
}

const MULTIPLIER: u128 = 0x2360_ed05_1fc6_5da4_4385_df64_9fcc_f645;

impl Pcg64 {
    pub(super) fn seeded(seed: u64) -> Self {
        let [s0, s1, i0, i1] = seed_words(seed);
        let increment = ((i0 as u128) << 64 | i1 as u128) << 1 | 1;
        let mut rng = Self { state: 0, increment, half: None };
        rng.step();
        rng.state = rng.state.wrapping_add((s0 as u128) << 64 | s1 as u128);
        rng.step();
        rng
    }

    fn step(&mut self) {
        self.state = self.state.wrapping_mul(MULTIPLIER).wrapping_add(self.increment);
    }

    fn next_u64(&mut self) -> u64 {
        self.step();
        ((self.state >> 64) as u64 ^ self.state as u64).rotate_right((self.state >> 122) as u32)
    }

    /// 32 bits: the lower half of an output, then the upper.
    fn next_u32(&mut self) -> u32 {
        match self.half.take() {
            Some(half) => half,
            None => {
                let next = self.next_u64();
                self.half = Some((next >> 32) as u32);
                next as u32
            }
        }
    }

    /// A number below `bound` (at least 1) as `integers(0, bound, dtype=int64)` draws it: Lemire's method, on 32 bits
    /// where they are enough.
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        if bound == 1 {
            return 0;
        }
        if bound <= u32::MAX as u64 {
            let threshold = (1u64 << 32) % bound;
            loop {
                let product = self.next_u32() as u64 * bound;
                if product & u32::MAX as u64 >= threshold {
                    return product >> 32;
                }
            }
        }
        if bound == 1 << 32 {
            return self.next_u32() as u64;
        }
        let threshold = bound.wrapping_neg() % bound;
        loop {
            let product = self.next_u64() as u128 * bound as u128;
            if product as u64 >= threshold {
                return (product >> 64) as u64;
            }
        }
    }
}

/// `SeedSequence(seed).generate_state(4, uint64)`.
fn seed_words(seed: u64) -> [u64; 4] {
    const INIT_A: u32 = 0x43b0_d7e5;
    const MULT_A: u32 = 0x931e_8875;
    const INIT_B: u32 = 0x8b51_f9dd;
    const MULT_B: u32 = 0x58f3_8ded;
    const MIX_LEFT: u32 = 0xca01_f9dd;
    const MIX_RIGHT: u32 = 0x4973_f715;
    let fold = |v: u32| v ^ v >> 16;
    let mut constant = INIT_A;
    let mut hash = |value: u32| {
        let value = value ^ constant;
        constant = constant.wrapping_mul(MULT_A);
        fold(value.wrapping_mul(constant))
    };
    let mix = |x: u32, y: u32| fold(x.wrapping_mul(MIX_LEFT).wrapping_sub(y.wrapping_mul(MIX_RIGHT)));

    let mut pool = [seed as u32, (seed >> 32) as u32, 0, 0].map(&mut hash);
    for source in 0..4 {
        for target in (0..4).filter(|&target| target != source) {
            pool[target] = mix(pool[target], hash(pool[source]));
        }
    }

    let mut constant = INIT_B;
    let mut word = |i: usize| {
        let value = pool[i % 4] ^ constant;
        constant = constant.wrapping_mul(MULT_B);
        fold(value.wrapping_mul(constant)) as u64
    };
    std::array::from_fn(|i| word(2 * i) | word(2 * i + 1) << 32)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Printed by numpy 2.4: `default_rng(seed).integers(0, bound, size=4, dtype=int64)`.
    #[test]
    fn draws_are_numpys() {
        let cases: [(u64, u64, [u64; 4]); 7] = [
            (10007, 46_540_429_499_143, [38316864093376, 2419989587448, 17980219101293, 36994456634895]),
            (
                7,
                1_537_228_672_809_129_301,
                [960914674507695670, 1379222780490494860, 1192406284132652231, 346194949776311109],
            ),
            (70049, (1 << 32) + 1, [3801034713, 3219680832, 3452583857, 319665461]),
            (140_098, 1 << 32, [3473391889, 3124677673, 274795388, 2376879038]),
            (5, (1 << 32) - 1, [2881021351, 3457461229, 97294836, 3470079268]),
            (123_456_789_012, 3_000_000_000, [2857309716, 1698194024, 251012578, 1435110024]),
            (0, 10, [8, 6, 5, 2]),
        ];
        for (seed, bound, expected) in cases {
            let mut rng = Pcg64::seeded(seed);
            assert_eq!([(); 4].map(|_| rng.below(bound)), expected, "seed {seed}, bound {bound}");
        }
        assert_eq!(Pcg64::seeded(0).below(1), 0);
    }
}
