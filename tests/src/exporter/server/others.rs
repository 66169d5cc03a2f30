//! Memory of other kinds than chunks in a reservation: pools and what is allocated from them, memory of `cuMemAlloc`.

use core::ptr::null_mut;

use super::{Answer, Server, at, done, text};
use crate::pattern;

impl Server {
    pub(super) fn answer_about_others(&mut self, what: &str, words: &[&str], numbers: &[u64]) -> Answer {
        match (what, numbers) {
            // A pool on a device, of these handle types: its number.
            ("pool", &[device, types]) => {
                let (device, types) = (i32::try_from(device).map_err(text)?, u32::try_from(types).map_err(text)?);
                self.pools.push(Some(self.cuda.pool_create(device, types).map_err(text)?.expose_provenance()));
                Ok((self.pools.len() - 1).to_string())
            }
            ("pool_alloc", &[pool, len, seed]) => {
                let pool = self.pools[at(pool)].ok_or("no pool")?;
                let pool = core::ptr::with_exposed_provenance_mut(pool);
                let size = usize::try_from(len).map_err(text)?;
                let address = self.cuda.alloc_from_pool(size, pool, null_mut()).map_err(text)?;
                // Memory of a pool is there when its stream has come so far.
                self.cuda.stream_synchronize(null_mut()).map_err(text)?;
                pattern::fill(&self.cuda, address, len, seed).map_err(text)?;
                Ok(address.to_string())
            }
            ("alloc", &[len, seed]) => {
                let address = self.cuda.mem_alloc(usize::try_from(len).map_err(text)?).map_err(text)?;
                pattern::fill(&self.cuda, address, len, seed).map_err(text)?;
                Ok(address.to_string())
            }
            ("fill_at", &[address, len, seed]) => done(pattern::fill(&self.cuda, address, len, seed)),
            ("check_at", &[address, len, seed]) => done(pattern::check(&self.cuda, address, 0, len, seed)),
            ("free_at", &[address]) => done(self.cuda.mem_free(address)),
            ("retire_at", &[address, len]) => Ok(self.exporter()?.retire(address, len).to_string()),
            ("pool_destroy", &[pool]) => {
                let pool = self.pools[at(pool)].take().ok_or("no pool")?;
                done(self.cuda.pool_destroy(core::ptr::with_exposed_provenance_mut(pool)))
            }
            ("refusals", []) => {
                let refusals = self.exporter()?.refusals();
                let words: Vec<String> =
                    refusals.iter().map(|refused| format!("{}={}", refused.first.cause.name(), refused.times)).collect();
                Ok(words.join(" "))
            }
            ("pools", []) => Ok(self.exporter()?.stats().pools.to_string()),
            _ => self.answer_about_fds(what, words, numbers),
        }
    }
}
