//! Random numbers for tests that print how to repeat them.

/// The variable with which a run is repeated.
pub const SEED: &str = "CUDA_IPC_SEED";

/// A small generator (xorshift64): good enough to choose steps, the same on every machine.
#[derive(Clone, Copy, Debug)]
pub struct Random(u64);

impl Random {
    /// One with this seed.
    pub const fn new(seed: u64) -> Self {
        // Neighbouring seeds begin apart, and none begins at 0, where it would stay.
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// With the seed of [`SEED`], or one of now; prints it.
    pub fn from_environment() -> Self {
        let seed = std::env::var(SEED).ok().map(|seed| seed.parse().expect("CUDA_IPC_SEED is a number"));
        let seed = seed.unwrap_or_else(|| {
            let now = std::time::UNIX_EPOCH.elapsed().expect("a clock after 1970");
            u64::from(now.subsec_nanos()) << 20 ^ u64::from(std::process::id())
        });
        println!("{SEED}={seed}");
        Self::new(seed)
    }

    /// A number below `limit`, which is not 0.
    pub const fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 20) % limit
    }
}
